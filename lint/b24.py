for dtype in (torch.float32, torch.float64):
    print(f"{(torch.tensor(1.0, dtype=dtype) + 1e-6 - 1.0).item():.3e}")
