"""The public names for type checkers and editors, who cannot follow `_FACE`."""

from feddg_bench.analysis.tables.make import TableOptions as TableOptions
from feddg_bench.api import run as run
from feddg_bench.api import table as table
from feddg_bench.api import tables as tables
from feddg_bench.common.errors import FeddgError as FeddgError
from feddg_bench.common.streams import torch_generator as torch_generator
from feddg_bench.config.schema import MethodSettings as MethodSettings
from feddg_bench.config.schema import Resources as Resources
from feddg_bench.core.aggregation import fold as fold
from feddg_bench.core.aggregation import streaming_mean as streaming_mean
from feddg_bench.core.aggregation import watched as watched
from feddg_bench.core.aggregation import weighted_mean as weighted_mean
from feddg_bench.core.client import Batch as Batch
from feddg_bench.core.client import Client as Client
from feddg_bench.core.messages import LocalUpdate as LocalUpdate
from feddg_bench.core.messages import Reply as Reply
from feddg_bench.core.messages import Weights as Weights
from feddg_bench.core.method import Method as Method
from feddg_bench.core.server import Server as Server
from feddg_bench.data.dataset import DomainDataset as DomainDataset
from feddg_bench.data.dataset import FileDataset as FileDataset
from feddg_bench.data.dataset import Listing as Listing
from feddg_bench.data.image_folders import ImageFolderDataset as ImageFolderDataset
from feddg_bench.data.partition import heterogeneous_counts as heterogeneous_counts
from feddg_bench.data.partition import heterogeneous_indices as heterogeneous_indices
from feddg_bench.engine.construction import build_method as build_method
from feddg_bench.records.frame import load_records as load_records
from feddg_bench.runs.images import open_dataset as open_dataset
from feddg_bench.runs.kept import load_model as load_model
from feddg_bench.runs.observer import Observer as Observer
from feddg_bench.runs.request import Request as Request
from feddg_bench.runs.setup import Run as Run

__version__: str
_FACE: dict[str, str]
