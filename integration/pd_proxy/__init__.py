"""An example of a proxy for prefill and decode engines. It is not a product: production has routers of its own.

It shows all that such a proxy has to do for our connector, in the open: what each engine is told, what may be tried
again, and what is passed on to the client. `docs/peers.md` says how to run it.
"""
