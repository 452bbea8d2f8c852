"""The lockstep engine: a Keras model's step runs in all towers, which wait for each other at each yield.

A batch goes through it in this order: `model` takes it from Keras' fit, `parts` cuts it, `towers` compute on their
parts, `engine` advances them from yield to yield, `merges` makes their values the batch's, `backward` their gradients
one, and `exchange` does the same among processes.
"""
