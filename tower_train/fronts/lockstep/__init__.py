"""The lockstep engine: a Keras model's step runs in all towers, which wait for each other at each yield.

A batch goes through it in this order: `model` takes it from Keras' fit, `parts` cuts it, `engine` advances each `tower`
from yield to yield, which computes within a `tower_call`; `meeting` makes their values the batch's, with those of other
workers by an `exchange`, and `backward` the losses one gradient. `requests` are what a step yields, `default_step` has
Keras' own steps. Around Keras' methods several workers do all `together`.
"""
