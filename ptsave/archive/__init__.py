"""One torch archive, read: records, storages, checks, unpickling."""
