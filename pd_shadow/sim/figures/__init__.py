"""The paper's figures and tables as experiments, one file each."""
