"""The CPU platform: real SGLang with DFLASH on a machine without a GPU."""
