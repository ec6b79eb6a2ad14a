"""`jaxmem.stack`: the loop over equal layers, with a backward pass of its own."""
