"""The persistent engine of a recompile: weights loaded once, candidates hot-swapped in disposable, contained runners.

It decides how a candidate is built, contained, driven and killed; whether it is right and fast is `tkcc.verify`'s.
"""
