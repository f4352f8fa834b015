# Three methods on the same clients.
hpcfl run method.name=local train.rounds=3 --out runs/examples/local
hpcfl run method.name=fedavg train.rounds=3 --out runs/examples/fedavg
hpcfl run method.name=pfedla train.rounds=3 --out runs/examples/pfedla
hpcfl compare runs/examples/pfedla runs/examples/local
hpcfl report runs/examples --out compare.html
