"""The pod scheduler: cluster objects in, bindings, conditions and events out."""
