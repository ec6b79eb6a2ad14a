"""Models, each as three functions: embed, one layer, head. Imports `data` and `config`."""
