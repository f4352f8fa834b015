# A method of your own beside FedAvg; hpcfl knows it by its file.
hpcfl list --method docs/examples/fedmedian.py
hpcfl run method.path=docs/examples/fedmedian.py train.rounds=3 --out runs/examples/fedmedian
hpcfl run method.name=fedavg train.rounds=3 --out runs/examples/fedavg
hpcfl compare runs/examples/fedmedian runs/examples/fedavg --own-code docs/examples/fedmedian.py
