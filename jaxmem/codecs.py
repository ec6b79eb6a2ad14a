"""Codecs, their text forms, and the default codec for each kind of tensor."""

from jaxmem._model.codecs.base import Codec as Codec
from jaxmem._model.codecs.base import references as references
from jaxmem._model.codecs.int4 import ChannelwiseSymmetric as ChannelwiseSymmetric
from jaxmem._model.codecs.int4 import GroupedAsymmetric as GroupedAsymmetric
from jaxmem._model.codecs.int4 import GroupedSymmetric as GroupedSymmetric
from jaxmem._model.codecs.int4 import NaivePerToken as NaivePerToken
from jaxmem._model.codecs.mask import BitMask as BitMask
from jaxmem._model.codecs.outlier import OutlierSeparated as OutlierSeparated
from jaxmem._model.codecs.registry import KINDS as KINDS
from jaxmem._model.codecs.registry import default_for as default_for
from jaxmem._model.codecs.registry import parse as parse
