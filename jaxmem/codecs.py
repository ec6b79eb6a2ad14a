"""Codecs: how a tensor is compressed, in what text form a plan names them, and which kind of tensor
takes which.
"""

from jaxmem._codecs.base import Codec as Codec
from jaxmem._codecs.base import references as references
from jaxmem._codecs.int4 import ChannelwiseSymmetric as ChannelwiseSymmetric
from jaxmem._codecs.int4 import GroupedAsymmetric as GroupedAsymmetric
from jaxmem._codecs.int4 import GroupedSymmetric as GroupedSymmetric
from jaxmem._codecs.int4 import NaivePerToken as NaivePerToken
from jaxmem._codecs.mask import BitMask as BitMask
from jaxmem._codecs.outlier import OutlierSeparated as OutlierSeparated
from jaxmem._codecs.registry import KINDS as KINDS
from jaxmem._codecs.registry import default_for as default_for
from jaxmem._codecs.registry import parse as parse
