"""Codecs: how a tensor is compressed, in what text form a plan names them, and which kind of tensor takes which."""

from jaxmem._codecs import KINDS as KINDS
from jaxmem._codecs import default_for as default_for
from jaxmem._codecs import parse as parse
from jaxmem._codecs_base import Codec as Codec
from jaxmem._codecs_int4 import ChannelwiseSymmetric as ChannelwiseSymmetric
from jaxmem._codecs_int4 import GroupedAsymmetric as GroupedAsymmetric
from jaxmem._codecs_int4 import GroupedSymmetric as GroupedSymmetric
from jaxmem._codecs_int4 import NaivePerToken as NaivePerToken
from jaxmem._codecs_mask import BitMask as BitMask
from jaxmem._codecs_outlier import OutlierSeparated as OutlierSeparated
