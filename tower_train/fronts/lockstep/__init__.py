"""The lockstep engine: a Keras model's step runs in all towers, which wait for each other at each yield.

A batch goes through it in this order: `model` takes it from Keras' fit, `parts` cuts it, `engine` advances each `tower`
from yield to yield, with its rows of `draws`; `meeting` makes their values and losses the batch's, with those of other
workers by an `exchange`. `requests` are what a step yields, Keras' own steps too. Around Keras' methods several workers
do all `together`.
"""
