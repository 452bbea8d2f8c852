"""Keras models in towers: a model's step runs in all of them, and they meet where it concerns all.

A batch goes through it in this order: `model` takes it from Keras' `fit`; a `step` cuts it into parts and runs a
program in all towers, Keras' own of `fit` or the model's `train_step`, which meets where it makes one of the `calls`:
there a `whole` makes the towers' rows, means and gradients those of one device, and those of other workers come by an
`exchange`. Around Keras' methods several workers do all `together`. `proof` compares towers with one device.
"""
