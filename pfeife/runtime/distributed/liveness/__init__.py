"""Who is there, who is late, who is gone: how ranks find one another, and who is to blame.

`rendezvous` counts them in, `starting` says which of them have not come. Read `heartbeat` first:
a thread that shows this rank to the others and hears of failures; `watchdog` looks whether anybody
waits for too long, `diagnosis` says for whom. `keepalive` are sockets that end with a process, over
the network of an `interface`. `ending` ends a rank that does not come out of its own computing,
`last_words` says at the end of all what has happened.
"""
