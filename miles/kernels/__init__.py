"""Fast ways to compute what plain PyTorch computes too: engine and learner share them."""
