"""What is seen of a forward pass through a pathway's probe: states, interventions, depth weights, and their pictures.

These measure a Transformer on batches of tokens and know neither a particular pathway nor any file.
"""
