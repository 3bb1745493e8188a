"""The numbers under the pathways. `reference` is the oracle that every faster implementation is compared with."""
