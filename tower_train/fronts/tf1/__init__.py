"""Programs of TensorFlow 1 as they were published: their names, on today's TensorFlow.

`source.read` says which names a program uses, `names.table` where these are today; `views.Names.install` lets its
imports find them there, and `machine.prepare` (or `keras_models.prepare`, for Keras 3) changes how they work.
"""
