"""An exception of somebody else's code in a sentence of ours."""


def described(error: BaseException) -> str:
    """Its type and its text, as Python shows them: "KeyError: 'gone'"."""
    # str() of a SyntaxError names its line too, which is told apart
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
