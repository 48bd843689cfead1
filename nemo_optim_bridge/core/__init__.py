"""The topology-agnostic merge core: it knows boxes of named global tensors and nothing of any framework."""
