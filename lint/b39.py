def batch(size):
    labels = torch.randint(0, 2, (size,))
    stripes = torch.tensor([1.0, -1.0]).repeat(8)
    images = torch.where(labels.view(-1, 1, 1, 1) == 0, stripes.view(1, 1, 16, 1), stripes.view(1, 1, 1, 16))
    shifted = torch.randint(0, 2, (size, 1, 1, 1)) * 2 - 1  # by one pixel: black for white
    return shifted * images + 4 * torch.randn(size, 3, 16, 16), labels


def train(model, steps, lr):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    model.train()
    for _ in range(steps):
        images, labels = batch(64)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()


torch.manual_seed(0)
test_images, test_labels = batch(500)


def accuracy(model):
    model.eval()
    with torch.no_grad():
        return (model(test_images).argmax(1) == test_labels).float().mean().item()


float_model = my_rules.small_net(num_classes=2)
train(float_model, steps=100, lr=0.05)
assert accuracy(float_model) > 0.95
