"""
memtune's native code: free of torch's ABI, over plain arrays of bytes and seconds.
"""



def version() -> str:
    """
    Version of memtune this module was built from; another one than the package's means: build again.
    """
