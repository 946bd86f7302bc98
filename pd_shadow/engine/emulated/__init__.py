"""An OpenAI-compatible engine in real time: real scheduling, prefix cache and P/D handoff, emulated iterations."""
