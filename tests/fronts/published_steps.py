"""The tower_steps of keras.io's published models that have a train_step, by the name of the model's class."""

import keras
import tensorflow as tf

from tower_train import steps


def GAN(self, images):  # noqa: N802
    """generative/dcgan_overriding_train_step.py."""
    count = tf.shape(images)[0]
    generated = self.generator(tf.random.normal((count, self.latent_dim)))
    labels = tf.concat([tf.ones((count, 1)), tf.zeros((count, 1))], axis=0)
    labels += 0.05 * tf.random.uniform(tf.shape(labels))
    d_loss = self.loss_fn(labels, self.discriminator(tf.concat([generated, tf.cast(images, tf.float64)], axis=0)))
    yield steps.Loss(d_loss, self.discriminator.trainable_weights, self.d_optimizer)
    noise = tf.random.normal((count, self.latent_dim))
    g_loss = self.loss_fn(tf.zeros((count, 1)), self.discriminator(self.generator(noise)))
    yield steps.Loss(g_loss, self.generator.trainable_weights, self.g_optimizer)
    return {"d_loss": d_loss, "g_loss": g_loss}


def WGAN(self, images):  # noqa: N802
    """generative/wgan_gp.py."""
    count = tf.shape(images)[0]
    for _ in range(self.d_steps):
        fakes = self.generator(tf.random.normal((count, self.latent_dim)), training=True)
        scores = self.discriminator(fakes, training=True), self.discriminator(images, training=True)
        d_loss = self.d_loss_fn(real_img=scores[1], fake_img=scores[0])
        d_loss += self.gp_weight * self.gradient_penalty(count, images, fakes)
        yield steps.Loss(d_loss, self.discriminator.trainable_variables, self.d_optimizer)
    fakes = self.generator(tf.random.normal((count, self.latent_dim)), training=True)
    g_loss = self.g_loss_fn(self.discriminator(fakes, training=True))
    yield steps.Loss(g_loss, self.generator.trainable_variables, self.g_optimizer)
    return {"d_loss": d_loss, "g_loss": g_loss}


def VAE(self, images):  # noqa: N802
    """generative/vae.py."""
    z_mean, z_log_var, z = self.encoder(images)
    losses = keras.losses.binary_crossentropy(images, self.decoder(z))
    kl_losses = -0.5 * (1 + z_log_var - tf.square(z_mean) - tf.exp(z_log_var))
    loss = tf.reduce_mean(tf.reduce_sum(losses, axis=(1, 2))) + tf.reduce_mean(tf.reduce_sum(kl_losses, axis=1))
    yield steps.Loss(loss)
    return {"loss": loss}


def ContrastiveModel(self, data):  # noqa: N802
    """vision/semisupervised_simclr.py."""
    (unlabelled, _), (labelled, labels) = data
    images = tf.concat((unlabelled, labelled), axis=0)
    views = [self.contrastive_augmenter(images, training=True) for _ in range(2)]
    first, second = yield steps.Join(tuple(self.projection_head(self.encoder(view, training=True)) for view in views))
    loss = tf.reduce_sum(self.contrastive_loss(first, second))  # a tape adds the losses of examples
    weights = self.encoder.trainable_weights + self.projection_head.trainable_weights
    yield steps.Loss(loss, weights, self.contrastive_optimizer)
    features = self.encoder(self.classification_augmenter(labelled, training=True), training=False)
    probe_loss = self.probe_loss(labels, self.linear_probe(features, training=True))
    yield steps.Loss(probe_loss, self.linear_probe.trainable_weights, self.probe_optimizer)
    return {"c_loss": loss, "p_loss": probe_loss}


def Distiller(self, data):  # noqa: N802
    """vision/knowledge_distillation.py."""
    x, y = data
    students = self.student(x, training=True)
    soft = [tf.nn.softmax(each / self.temperature, axis=1) for each in (self.teacher(x, training=False), students)]
    loss = self.alpha * self.student_loss_fn(y, students) + (1 - self.alpha) * self.distillation_loss_fn(*soft)
    yield steps.Loss(loss, self.student.trainable_variables)
    return {"loss": loss}
