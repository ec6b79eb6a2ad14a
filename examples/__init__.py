"""Scripts that train with other libraries under a byte budget: code to read and to copy."""
