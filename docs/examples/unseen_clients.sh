# Two of ten clients are new at every evaluation: how do they do with a shared body, and with one global model?
hpcfl run method.name=fedrep data.unseen_clients=0.2 train.rounds=3 --out runs/examples/unseen-fedrep
hpcfl run method.name=fedavg data.unseen_clients=0.2 train.rounds=3 --out runs/examples/unseen-fedavg
hpcfl compare runs/examples/unseen-fedrep runs/examples/unseen-fedavg
hpcfl export runs/examples/unseen-fedrep --client 9 --out client9
