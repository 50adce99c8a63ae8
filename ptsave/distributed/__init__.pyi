from ptsave.distributed.reader import StorageReader as StorageReader
from ptsave.distributed.writer import StorageWriter as StorageWriter

__all__ = ["StorageReader", "StorageWriter"]
