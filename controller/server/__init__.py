"""gRPC servicers and processes around the core: they translate, they do not decide."""
