"""A network around each layer of Keras, and why some layers stand in none.

Statistics of batches are those of all replicas: without that, Keras keeps those of the first one,
and Sluice their mean. Layers that draw have nothing to draw: rates and factors are 0, and where
places are drawn, an image has one colour.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras
from keras import layers as L
from keras import ops

from tests.training.networks.plain_fit import WIDTH, Build

Tensor = keras.KerasTensor


def row(x: Tensor) -> Tensor:
    """Leaves 48 numbers as they are."""
    return x


def words(x: Tensor) -> Tensor:
    """Makes lists of 12 vectors of 4 numbers."""
    return L.Reshape((12, 4))(x)


def image(x: Tensor) -> Tensor:
    """Makes images of 4 x 4 points, values between 0 and 1."""
    return L.Reshape((4, 4, 3))((x + 1.0) / 2.0)


def volume(x: Tensor) -> Tensor:
    """Makes bodies of 4 x 4 x 3 points."""
    return L.Reshape((4, 4, 3, 1))(x)


def colour(x: Tensor) -> Tensor:
    """Makes images of one colour each, values between 0 and 1."""
    return L.Reshape((8, 8, 3))(L.RepeatVector(64)((x[:, :3] + 1.0) / 2.0))


def wave(x: Tensor) -> Tensor:
    """Makes sounds of 384 samples."""
    return L.Flatten()(L.RepeatVector(8)(x))


def loud_wave(x: Tensor) -> Tensor:
    """Makes sounds whose gradients float16 holds; else one replica of `fit` takes infinite ones."""
    return wave(30.0 * x)


def ids(x: Tensor) -> Tensor:
    """Makes eight whole numbers below 9."""
    return ops.cast(ops.round((x[:, :8] + 1.0) * 4.0), "int32")


def halves(x: Tensor) -> list[Tensor]:
    """Cuts the numbers in two."""
    return [x[:, : WIDTH // 2], x[:, WIDTH // 2 :]]


_UNIT = {"value_range": (0, 1)}
_STILL = {"factor": 0.0, **_UNIT}
_ARGUMENTS: dict[Callable[[Tensor], Any], dict[str, dict[str, Any]]] = {
    row: {
        "Activation": {"activation": "gelu"},
        "ActivityRegularization": {"l1": 0.01, "l2": 0.01},
        "AlphaDropout": {"rate": 0.0},
        "BatchNormalization": {"synchronized": True},
        "Dense": {"units": 5, "kernel_regularizer": "l2"},
        "Discretization": {"bin_boundaries": [-0.5, 0.0, 0.5], "output_mode": "one_hot"},
        "Dropout": {"rate": 0.0},
        "ELU": {},
        "EinsumDense": {"equation": "ab,bc->ac", "output_shape": 5, "bias_axes": "c"},
        "GaussianDropout": {"rate": 0.0},
        "GaussianNoise": {"stddev": 0.0},
        "GroupNormalization": {"groups": 4},
        "Identity": {},
        "Lambda": {"function": ops.sin},
        "LayerNormalization": {},
        "LeakyReLU": {},
        "Normalization": {"mean": 0.1, "variance": 0.5},
        "PReLU": {"alpha_initializer": keras.initializers.Constant(0.2)},
        "RMSNormalization": {},
        "ReLU": {"negative_slope": 0.1},
        "RepeatVector": {"n": 3},
        "Rescaling": {"scale": 2.0, "offset": 0.5},
        "Reshape": {"target_shape": (6, 8)},
        "Softmax": {},
        "UnitNormalization": {},
    },
    words: {
        "AdaptiveAveragePooling1D": {"output_size": 3},
        "AdaptiveMaxPooling1D": {"output_size": 3},
        "AveragePooling1D": {"pool_size": 2},
        "Conv1D": {"filters": 3, "kernel_size": 2},
        "Conv1DTranspose": {"filters": 3, "kernel_size": 2},
        "Cropping1D": {"cropping": 2},
        "DepthwiseConv1D": {"kernel_size": 2},
        "Flatten": {},
        "GRU": {"units": 3},
        "GlobalAveragePooling1D": {},
        "GlobalMaxPooling1D": {},
        "LSTM": {"units": 3},
        "Masking": {},
        "MaxPooling1D": {"pool_size": 2},
        "Permute": {"dims": (2, 1)},
        "SeparableConv1D": {"filters": 3, "kernel_size": 2},
        "SimpleRNN": {"units": 3},
        "SpatialDropout1D": {"rate": 0.0},
        "UpSampling1D": {"size": 2},
        "ZeroPadding1D": {"padding": 1},
    },
    image: {
        "AdaptiveAveragePooling2D": {"output_size": 2},
        "AdaptiveMaxPooling2D": {"output_size": 2},
        "AutoContrast": _UNIT,
        "AveragePooling2D": {"pool_size": 2},
        "CenterCrop": {"height": 2, "width": 2},
        "ContrastLimitedAdaptiveHistogramEqualization": {"tile_grid_size": (2, 2), **_UNIT},
        "Conv2D": {"filters": 3, "kernel_size": 2},
        "Conv2DTranspose": {"filters": 3, "kernel_size": 2},
        "Cropping2D": {"cropping": 1},
        "DepthwiseConv2D": {"kernel_size": 2},
        "GlobalAveragePooling2D": {},
        "GlobalMaxPooling2D": {},
        "MaxPooling2D": {"pool_size": 2},
        "RandomBrightness": _STILL,
        "RandomColorDegeneration": _STILL,
        "RandomColorJitter": _UNIT,
        "RandomContrast": _STILL,
        "RandomCrop": {"height": 4, "width": 4},
        "RandomErasing": _STILL,
        "RandomGaussianBlur": _STILL,
        "RandomGrayscale": {"factor": 0.0},
        "RandomHue": _STILL,
        "RandomInvert": _STILL,
        "RandomPerspective": {"factor": 0.0},
        "RandomPosterization": {"factor": (4, 4), **_UNIT},
        "RandomRotation": {"factor": 0.0},
        "RandomSaturation": {"factor": (0.5, 0.5), **_UNIT},
        "RandomSharpness": _STILL,
        "RandomShear": {},
        "RandomTranslation": {"height_factor": 0.0, "width_factor": 0.0},
        "RandomZoom": {"height_factor": 0.0},
        "Resizing": {"height": 6, "width": 6},
        "SeparableConv2D": {"filters": 3, "kernel_size": 2},
        "Solarization": _UNIT,
        "SpatialDropout2D": {"rate": 0.0},
        "UpSampling2D": {},
        "ZeroPadding2D": {},
    },
    colour: {
        "RandomElasticTransform": _STILL,
        "RandomFlip": {},
    },
    volume: {
        "AdaptiveAveragePooling3D": {"output_size": 2},
        "AdaptiveMaxPooling3D": {"output_size": 2},
        "AveragePooling3D": {"pool_size": 2},
        "Conv3D": {"filters": 3, "kernel_size": 2},
        "Conv3DTranspose": {"filters": 3, "kernel_size": 2},
        "Cropping3D": {},
        "GlobalAveragePooling3D": {},
        "GlobalMaxPooling3D": {},
        "MaxPooling3D": {"pool_size": 2},
        "SpatialDropout3D": {"rate": 0.0},
        "UpSampling3D": {},
        "ZeroPadding3D": {},
    },
    loud_wave: {
        "MelSpectrogram": {
            "fft_length": 64,
            "sequence_stride": 32,
            "num_mel_bins": 8,
            "min_power": 0.1,
        },
    },
    ids: {
        "CategoryEncoding": {"num_tokens": 9},
        "Embedding": {"input_dim": 9, "output_dim": 3, "mask_zero": True},
        "Hashing": {"num_bins": 5},
        "ReversibleEmbedding": {"input_dim": 9, "output_dim": 3},
    },
    halves: {
        "Add": {},
        "Average": {},
        "Concatenate": {},
        "Dot": {"axes": 1},
        "Maximum": {},
        "Minimum": {},
        "Multiply": {},
        "Subtract": {},
    },
}


def _build(name: str, shape: Callable[[Tensor], Any], arguments: dict[str, Any]) -> Build:
    return lambda x: getattr(L, name)(**arguments)(shape(x))


def _cells(cell: Callable[[], L.Layer]) -> Build:
    return lambda x: L.RNN(cell())(words(x))


STANDING: dict[str, Build] = {
    name: _build(name, shape, arguments)
    for shape, named in _ARGUMENTS.items()
    for name, arguments in named.items()
} | {
    "AdditiveAttention": lambda x: L.AdditiveAttention()([words(x), words(x)]),
    "Attention": lambda x: L.Attention(use_scale=True)([words(x), words(x)]),
    "Bidirectional": lambda x: L.Bidirectional(L.LSTM(3))(words(x)),
    "ConvLSTM1D": lambda x: L.ConvLSTM1D(2, 2)(L.Reshape((4, 4, 3))(x)),
    "ConvLSTM2D": lambda x: L.ConvLSTM2D(2, 2)(L.Reshape((3, 4, 4, 1))(x)),
    "ConvLSTM3D": lambda x: L.ConvLSTM3D(2, 2)(L.Reshape((3, 2, 2, 2, 2))(x)),
    "GRUCell": _cells(lambda: L.GRUCell(3)),
    "GroupQueryAttention": lambda x: L.GroupQueryAttention(3, 4, 2)(words(x), words(x)),
    "HashedCrossing": lambda x: L.HashedCrossing(5, output_mode="one_hot")(
        (ids(x)[:, :1], ids(x)[:, 1:2])
    ),
    "IntegerLookup": lambda x: L.IntegerLookup(vocabulary=[1, 2, 5], output_mode="multi_hot")(
        ids(x)
    ),
    "LSTMCell": _cells(lambda: L.LSTMCell(3)),
    "MultiHeadAttention": lambda x: L.MultiHeadAttention(2, 3)(words(x), words(x)),
    "Pipeline": lambda x: L.Pipeline([L.Rescaling(2.0), L.UnitNormalization()])(x),
    "RNN": _cells(lambda: L.SimpleRNNCell(3)),
    "SimpleRNNCell": _cells(lambda: L.SimpleRNNCell(3)),
    "STFTSpectrogram": lambda x: L.STFTSpectrogram(frame_length=64, frame_step=32, window=None)(
        L.Reshape((384, 1))(wave(x))
    ),
    "SpectralNormalization": lambda x: L.SpectralNormalization(L.Dense(5))(x),
    "StackedRNNCells": _cells(lambda: L.StackedRNNCells([L.GRUCell(3), L.LSTMCell(2)])),
    "TimeDistributed": lambda x: L.TimeDistributed(L.Dense(2))(words(x)),
}
"""A function of numbers, by the name of the layer that it holds."""

_DRAWS = "draws whatever its arguments are"
LEFT_OUT = {
    "AugMix": _DRAWS,
    "CutMix": _DRAWS,
    "Equalization": "its output does not depend on its input where Keras builds a model",
    "FlaxLayer": "needs JAX",
    "InputLayer": "an input of its own, which nothing feeds: it is refused",
    "InputSpec": "no layer",
    "JaxLayer": "needs JAX",
    "Layer": "the base of all layers",
    "MaxNumBoundingBoxes": "takes boxes by name, of images",
    "MixUp": _DRAWS,
    "RandAugment": _DRAWS,
    "StringLookup": "reads text, and inputs are numbers",
    "TFSMLayer": "a model on the disk, without weights that Keras trains",
    "TextVectorization": "reads text, and inputs are numbers",
    "TorchModuleWrapper": "needs PyTorch",
    "Wrapper": "the base of layers around a layer",
}
"""Why a layer is not compared."""


_NO_BFLOAT16 = (
    "ActivityRegularization",
    "RandomPerspective",
    "RandomRotation",
    "RandomShear",
    "RandomTranslation",
    "RandomZoom",
    "STFTSpectrogram",
)
FIT_FAILS = {
    **{(name, "bfloat16"): "no kernel, or a mixture of types" for name in _NO_BFLOAT16},
}
"""Where Keras' own `fit` fails on a CPU."""


def list_layers() -> set[type]:
    """The classes that Keras ships as layers; some have several names."""
    return {value for value in vars(L).values() if inspect.isclass(value)}
