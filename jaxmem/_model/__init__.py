"""What a plan does inside a user's program: tags and policies (`tags`), codecs (`codecs`), the loop
over layers (`loop`), the layers of a program without tags (`layer`, `auto`), and where model
states are stored (`states`).
"""
