"""The lockstep engine: a Keras model's step runs in all towers, which wait for each other at each yield.

A batch goes through it in this order: `model` takes it from Keras' fit, a `meeting` cuts it into `parts`, advances each
`tower` from yield to yield, with its rows of `draws`, and makes their values and losses the batch's, those of other
workers by an `exchange`. `requests` are what a step yields, Keras' own steps too; the first batch is a `rehearsal`.
Around Keras' methods several workers do all `together`.
"""
