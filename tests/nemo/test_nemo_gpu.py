"""The real Apex on a GPU: masters are exact after a load, and steps agree with Apex's own fused Adam."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.nemo]

SCRIPT = """
import copy, os, sys, tempfile
import torch, torch.distributed as dist
from apex.optimizers import FusedAdam
from nemo_optim_bridge.plugins.nemo import DistributedFusedAdamBridge

stored = sys.argv[1] == 'stored'
torch.cuda.set_device(0)
dist.init_process_group('nccl', init_method=f'file://{tempfile.mktemp()}', rank=0, world_size=1)
shapes = [(128, 64), (64,), (3, 5, 7)]
generator = torch.Generator().manual_seed(0)
masters = [torch.randn(shape, generator=generator) for shape in shapes]
ties = masters[0].view(torch.int32)
ties.copy_((ties & ~0x1FFFF) | 0x8000)
moments = [(torch.randn(s, generator=generator) * 0.01, torch.rand(s, generator=generator) * 0.01) for s in shapes]
decay = {'lr': 1e-2, 'betas': (0.9, 0.98), 'eps': 1e-8, 'weight_decay': 0.1, 'bias_correction': True, 'step': 3}

mains = [m.clone().cuda().requires_grad_() for m in masters]
fused = FusedAdam([{'params': [mains[0], mains[2]]}, {'params': [mains[1]], 'weight_decay': 0.0}],
                  lr=1e-2, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1)
for main, (avg, square) in zip(mains, moments):
    fused.state[main].update(exp_avg=avg.clone().cuda(), exp_avg_sq=square.clone().cuda())
for group in fused.param_groups:
    group['step'] = 3

params = [torch.nn.Parameter(m.bfloat16().cuda()) for m in masters]
groups = [{'params': [params[0], params[2]], 'is_expert': False},
          {'params': [params[1]], 'weight_decay': 0.0, 'is_expert': False}]
optimizer = DistributedFusedAdamBridge(
    groups, lr=5.0, betas=(0.5, 0.5), eps=1.0, weight_decay=0.3, dtype=torch.float32, param_sync_dtype=torch.bfloat16,
    store_params=stored, store_param_remainders=not stored, bucket_cap_mb=0.01)
order = [0, 2, 1]
state = {n: {'param': masters[i], 'exp_avg': moments[i][0], 'exp_avg_sq': moments[i][1]} for n, i in enumerate(order)}
arriving = {'optimizer': {'param_groups': [{**decay, 'weight_decay': 0.0}, decay]},
            'param_groups': [{'params': [0, 1]}, {'params': [2]}], 'state': state}
optimizer.load_state_dict(arriving)
assert [g['weight_decay'] for g in optimizer.param_groups] == [0.1, 0.0]
assert int(optimizer.state['step']) == 3

def compare(tolerance):
    now = optimizer.state_dict()['state']
    for n, i in enumerate(order):
        main = mains[i]
        for name, wanted in (('param', main), ('exp_avg', fused.state[main]['exp_avg']),
                             ('exp_avg_sq', fused.state[main]['exp_avg_sq'])):
            worst = (now[n][name] - wanted.detach().cpu()).abs().max().item()
            assert worst <= tolerance, (name, i, worst)

compare(0.0)
for step in range(3):
    for main, param in zip(mains, params):
        grad = torch.randn(main.shape, generator=generator).bfloat16().cuda()
        main.grad, param.grad = grad.float(), grad.clone()
    fused.step()
    optimizer.step()
    optimizer.zero_grad()
compare(1e-6)
print('exact')
"""


@pytest.mark.parametrize("mode", ["stored", "remainders"])
def test_a_load_is_exact_and_steps_agree(mode, tmp_path):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for module in ("apex.contrib.optimizers.distributed_fused_adam", "nemo.core", "transformer_engine"):
        pytest.importorskip(module, exc_type=ImportError)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = Path(__file__).parent.parent.parent
    command = [sys.executable, str(script), mode]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("exact")
