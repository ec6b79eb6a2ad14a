"""Optimizers that hold no whole gradient: AdamA (`adama`), and the released step (`released`)."""
