"""Sans-I/O policies, shared by the controller, the engines and the simulator."""
