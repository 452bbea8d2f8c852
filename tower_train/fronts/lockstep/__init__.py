"""Keras models in towers: a model's step runs in all of them, and they meet where it concerns all.

A batch goes through it in this order: `model` takes it from Keras' `fit` and cuts it into `parts`; a `step` runs a
program in all towers, Keras' own of `fit` or the model's `train_step`, with each tower's rows of `draws`, in the
`scope` of what it has assigned; rows, updates and metrics of other workers come by an `exchange`. Around Keras' methods
several workers do all `together`. `proof` compares towers with one device.
"""
