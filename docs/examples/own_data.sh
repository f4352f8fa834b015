# Images of your own, and a client's model taken away.
python docs/examples/make_images.py
hpcfl run data.source=npz data.path=images.npz data.layout=NCHW model.name=digits_cnn train.rounds=3 --out runs/examples/own
hpcfl predict runs/examples/own --client 3 images.npz --out labels.csv
hpcfl export runs/examples/own --client 3 --out client3
