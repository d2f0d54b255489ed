"""What all programs of Tangram have in common as programs: how they are configured, what they report of themselves, and how they end.

    program   from settings to the exit status
    options   settings from flags and environment variables, with one sentence for each that is wrong
    log       lines of JSON on standard error
    bounds    what an HTTP server accepts, and which connections it closes when clients exceed that
    serving   an HTTP server within bounds, over uvicorn: acceptor, protocol, fairness, fair_loop
    pages     /metrics, /healthz and /readyz of a program
    operations   their server, a process of its own: page, operations_server
    unix_socket   a connection to a server that may be behind with accepting
    signals   SIGTERM and SIGINT in an event loop

It decides nothing about GPUs or pods and uses neither Kubernetes nor NVML.
"""
