# A table of its own: accuracy and bytes by codec.
hpcfl table docs/examples/codecs.yaml --plan
hpcfl table docs/examples/codecs.yaml --out runs/examples/codecs
