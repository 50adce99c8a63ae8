from ptsave.distributed.planners import LoadPlanner as LoadPlanner
from ptsave.distributed.planners import SavePlanner as SavePlanner
from ptsave.distributed.reader import StorageReader as StorageReader
from ptsave.distributed.writer import StorageWriter as StorageWriter

__all__ = ["LoadPlanner", "SavePlanner", "StorageReader", "StorageWriter"]
