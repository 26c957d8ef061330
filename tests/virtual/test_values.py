"""What a script reads back: what was copied there small, else zero."""

from .conftest import Script


def test_what_was_copied_is_read_back(on_gpu: Script) -> None:
    answer = on_gpu(
        """
        import torch
        numbers = torch.arange(1000)
        on_device = numbers.to("cuda")
        answer = {"same": bool((on_device.cpu() == numbers).all()), "slice": on_device[10:13].tolist(),
                  "clone": on_device[5].clone().item(), "bool": bool(torch.tensor(True, device="cuda"))}
        """
    )
    assert answer == {"same": True, "slice": [10, 11, 12], "clone": 5, "bool": True}


def test_what_a_kernel_would_have_written_is_zero(on_gpu: Script) -> None:
    answer = on_gpu(
        """
        import torch
        x = torch.randn(100, 100, device="cuda")
        y = torch.empty(1 << 24).to("cuda")
        answer = {"sum": x.sum().item(), "ones": torch.ones(3, device="cuda").tolist(),
                  "back": float(y.cpu().abs().max()), "nan": bool(torch.isnan(x).any())}
        """
    )
    assert answer == {"sum": 0.0, "ones": [0, 0, 0], "back": 0.0, "nan": False}


def test_a_reused_block_forgets(on_gpu: Script) -> None:
    answer = on_gpu(
        """
        import torch
        seen = []
        for _ in range(100):
            flag = torch.tensor([-1.0, float("inf")], device="cuda")
            address = flag.data_ptr()
            del flag
            loss = torch.empty(2, device="cuda")
            assert loss.data_ptr() == address
            seen += loss.tolist()
            del loss
        answer = {"seen": sorted(set(seen))}
        """
    )
    assert answer == {"seen": [0.0]}


def test_gradient_scaling_and_clipping_see_no_overflow(on_gpu: Script) -> None:
    answer = on_gpu(
        """
        import torch
        layer = torch.nn.Linear(64, 64, device="cuda")
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda")
        steps = []
        optimizer.register_step_post_hook(lambda *_: steps.append(1))
        for _ in range(3):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = layer(torch.randn(8, 64, device="cuda")).sum()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        answer = {"steps": len(steps), "loss": loss.item(), "norm": norm.item()}
        """
    )
    assert answer == {"steps": 3, "loss": 0.0, "norm": 0.0}
