"""What a loop does, an action at a time.

``t.loss()`` runs the model on a fresh batch; ``t.log(name, value)`` notes a value of any kind; what an action
raises is noted, and the loop goes on.
"""

from __future__ import annotations

_TRAIN = """
loss = t.loss()
loss.backward()
t.log('loss', loss)
t.steps()
t.zero(<a:True|False>)
"""

ACTIONS: dict[str, str] = {
    "train": _TRAIN,
    "train quietly": """
for n in range(4):
    t.loss().backward()
    if n == 3: <a:pass|t.p(0).grad = None|t.p(0).data.mul_(0.5)|t.log_gradients()>
    if n == 3: <b:pass|t.opts[0].param_groups[0]['lr'] *= 0.5|t.halve_state()>
    t.steps()
    if n == 3: t.log_gradients()
    t.zero(True)
""",
    "backward": "t.log('loss', t.backward(t.loss()))",
    "step": "t.steps()",
    "zero grad": "t.zero(<a:True|False>)",
    "model zero grad": "m.zero_grad(set_to_none=<a:True|False>)",
    "train and look": """
loss = t.loss()
loss.backward()
t.log_gradients()
t.steps()
t.log_parameters()
t.zero(<a:True|False>)
""",
    "see gradients": "t.log_gradients()",
    "see parameters": "t.log_parameters()",
    "see one": "t.log('parameter', t.p(<a>)); t.log('grad', t.p(<a>).grad)",
    "see state": "t.log_state()",
    "layouts": "t.log('layouts', [(p.shape, p.stride(), p.is_contiguous(), p.dtype) for p in m.parameters()])",
    "see buffers": "t.log('buffers', dict(m.named_buffers()))",
    "write buffer": "with torch.no_grad(): t.log('buffer', t.buffer(<a>).<b:zero_()|mul_(2)|data.zero_()>)",
    "replace buffer": "t.replace_buffer(<a>, lambda b: <b:b.clone()|b * 2|b.detach()|torch.zeros_like(b)>)",
    "closure": """
for o in t.opts:
    t.log('returned', o.step(t.closure(o)))
""",
    "child": "t.log('child', m[<a> % len(m)](t.x()))",
    # graphs
    "retained": """
loss = t.loss()
loss.backward(retain_graph=True)
loss.backward()
""",
    "double backward": """
x = t.x().requires_grad_()
(slope,) = torch.autograd.grad(m(x).square().mean(), x, create_graph=True)
t.log('slope', slope)
slope.square().sum().backward()
""",
    "create graph": """
ps = t.trained()
slopes = torch.autograd.grad(t.loss(), ps, create_graph=True, allow_unused=True)
sum(s.square().sum() for s in slopes if s is not None).backward()
""",
    "backward create graph": """
import warnings
with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    t.loss().backward(create_graph=True)
t.zero(<a:True|False>)
""",
    "autograd grad": """
ps = t.trained()
for g in torch.autograd.grad(t.loss(), ps, allow_unused=True): t.log('grad', g)
""",
    "autograd grad one": "t.log('grad', torch.autograd.grad(t.loss(), t.p(<a>), allow_unused=True))",
    "backward inputs": "t.loss().backward(inputs=t.trained()[<a::|:1|::2>])",
    "loss kept": "t.keep['loss'] = t.loss()",
    "backward of kept": "t.keep['loss'].backward(<a:|retain_graph=True>)",
    "output grad": """
y = m(t.x())
y.retain_grad()
y.backward(torch.ones_like(y))
t.log('output grad', y.grad)
""",
    "input grad": """
x = t.x().requires_grad_()
m(x).sum().backward()
t.log('input grad', x.grad)
""",
    "penalty": "(t.loss() + sum(p.abs().square().sum().float() for p in t.trained()) * 0.01).backward()",
    # exceptions
    "forward fails": "t.failing_forward(<a>, <b:RuntimeError|KeyboardInterrupt>)",
    "backward fails": """
y = m(t.x())
y.register_hook(t.fail)
y.sum().backward()
""",
    "backward fails within": "t.failing_backward(<a>)",
    "step fails": "t.failing_step()",
    # evaluation
    "evaluate": """
m.eval()
with torch.<a:no_grad|inference_mode>():
    t.log('output', m(t.x()))
m.train()
""",
    "evaluate training": "with torch.<a:no_grad|inference_mode>(): t.log('output', m(t.x()))",
    "threads": "t.threads(<a:2|3>)",
    "train mode": "m.train(<a:False|True>)",
    "generated": """
y = t.x()
with torch.no_grad():
    for _ in range(3): y = m(y)
t.log('generated', y)
""",
    # saved tensors
    "checkpoint": """
from torch.utils.checkpoint import checkpoint
y = checkpoint(m, t.x().requires_grad_(), use_reentrant=<a:False|True>)
y.square().mean().backward()
""",
    "saved hooks": """
seen = []
def pack(x): seen.append((tuple(x.shape), x.dtype)); return <a:x|x.detach().clone()|x.numpy(force=True)>
def unpack(x): return <a:x|x|torch.from_numpy(x)>
with torch.autograd.graph.saved_tensors_hooks(pack, unpack): loss = t.loss()
loss.backward()
t.log('packed', seen)
""",
    "saved hooks change": """
def unpack(x): return x * 2 if x.is_floating_point() else x  # an index would be beyond the end
with torch.autograd.graph.saved_tensors_hooks(lambda x: x * 1, unpack): loss = t.loss()
loss.backward()
""",
    "save on cpu": "with torch.autograd.graph.save_on_cpu(): t.loss().backward()",
    "disable saved hooks": "with torch.autograd.graph.disable_saved_tensors_hooks('none here'): t.loss().backward()",
    # transforms
    "functional call": """
changed = {n: (p * 2).detach() for n, p in m.named_parameters()}
t.log('output', torch.func.functional_call(m, changed, (t.x(),)))
""",
    "func grad": """
ps = {n: p.detach() for n, p in m.named_parameters() if p.requires_grad and not p.is_complex()}
f = lambda ps, x: torch.func.functional_call(m, ps, (x,)).square().mean()
t.log('grads', torch.func.grad(f)(ps, t.x()))
""",
    "func of input": """
f = lambda x: m(x).square().mean()
t.log('transformed', torch.func.<a:grad(f)(t.x())|vjp(f, t.x())[0]|jvp(f, (t.x(),), (t.x(),))|jacrev(f)(t.x())>)
""",
    "vmap": "t.log('vmap', torch.func.vmap(lambda x: m(x[None])[0], randomness='<a:error|same|different>')(t.x()))",
    "forward ad": """
import torch.autograd.forward_ad as fwd
with fwd.dual_level():
    t.log('dual', fwd.unpack_dual(m(fwd.make_dual(t.x(), t.x())))[<a:1|0>])
""",
    "hessian": "t.log('hvp', torch.autograd.functional.vhp(lambda x: m(x).square().mean(), t.x(), t.x()))",
    # modes
    "autocast": "with torch.autocast('cpu', dtype=torch.bfloat16): loss = t.loss()\nloss.backward()",
    "dispatch mode": "with Dispatched(t): t.loss().backward()",
    "dispatch mode around step": "with Dispatched(t, is_around_step=True): t.steps()",
    "function mode": """
with Functions(t):
    loss = t.loss()
    <a:loss.backward()|torch.autograd.backward(loss)|t.log('slope', torch.autograd.grad(loss, t.p(0), allow_unused=True))>
""",
    "function mode around step": "with Functions(t, is_around_step=True): t.steps()",
    "function mode around zero grad": "with Functions(t): t.zero(<a:True|False>)",
    "function mode around looks": "with Functions(t): t.log('grad', t.p(<a>).grad); t.log('data', t.p(<a>).data)",
    "function mode around changes": """
p = t.p(<a>)
with Functions(t):
    <b:p.grad = None|p.data = p.data * 2|p.grad = torch.ones_like(p)|del p.grad>
""",
    "anomaly": "with torch.autograd.set_detect_anomaly(True, check_nan=False): t.loss().backward()",
    "deterministic": "with torch.random.fork_rng(): t.loss().backward()",
    # parameters changed
    "set": "with torch.no_grad(): t.p(<a>).set_(torch.ones_like(t.p(<a>)))",
    "data": "t.p(<a>).data = torch.full_like(t.p(<a>), 0.5)",
    "data from": "t.p(<a>).data = t.p(<a>).data * 2",
    "copy": "with torch.no_grad(): t.p(<a>).copy_(torch.full_like(t.p(<a>), 0.25))",
    "init": "nn.init.<b:normal_|zeros_|uniform_>(t.p(<a>))",
    "data in place": "t.p(<a>).data.mul_(2)",
    "detached in place": "t.p(<a>).detach().zero_()",
    "numpy in place": "t.halve(t.p(<a>).detach().numpy())",
    "numpy kept": "t.keep['array'] = t.p(<a>).detach().numpy()",
    "numpy kept written": "t.halve(t.keep['array'])",
    "numpy let go": "del t.keep['array']",
    "alias let go": "del t.keep['alias']",
    "descend": """
with torch.no_grad():
    for p in m.parameters():
        if p.grad is not None: p.sub_(p.grad * 0.1)
""",
    "descend foreach": """
ps = [p for p in m.parameters() if p.grad is not None]
with torch.no_grad(): torch._foreach_add_(ps, [p.grad for p in ps], alpha=-0.1)
""",
    "descend foreach rotated": """
ps = [p for p in m.parameters() if p.shape == (W, W)]
with torch.no_grad(): torch._foreach_add_(ps + ps<a:[::-1]|>, ps[1:] + ps[:1] + ps, alpha=0.1)
""",
    "reset": "t.reset(<a>)",
    "vector": """
v = nn.utils.parameters_to_vector(m.parameters())
t.log('vector', v)
nn.utils.vector_to_parameters(v.detach() * 0.5, m.parameters())
""",
    "alias kept": "t.keep['alias'] = t.p(<a>)<b:.data|.detach()|.view(-1)|.data[...]>",
    "alias kept for ever": "t.keep['for ever'] = t.p(<a>).data",
    "grad kept for ever": "t.keep['for ever'] = t.p(<a>).grad",
    "alias read": "t.log('alias', t.keep['alias'])",
    "alias used": "t.log('loss', t.backward(t.keep['alias'].abs().float().square().sum()))",
    "alias written": "with torch.no_grad(): t.keep['alias'].mul_(0.5)",
    "alias kept in inference mode": "with torch.inference_mode(): t.keep['alias'] = t.p(<a>)<b:.data|.detach()>",
    "alias over a step": """
t.loss().backward()
alias = t.p(<a>)<b:.detach()|.data|.detach().numpy(force=True)>
t.steps()
t.log('alias', torch.as_tensor(alias))
del alias
""",
    "change before a step": """
t.loss().backward()
t.change(<a>, <b>)
t.steps()
t.zero(True)
""",
    "requires grad": "t.p(<a>).requires_grad_(<b:False|True>)",
    "freeze": "m[<a> % len(m)].requires_grad_(<b:False|True>)",
    "parameter anew": "t.log('anew', nn.Parameter(t.p(<a>)))",
    "arithmetic": "t.log('made', (lambda p: <b:p * 2|p.float().sum()|torch.stack([p, p])>)(t.p(<a>)))",
    "parametrize": "t.parametrize(<a>)",
    "unparametrize": "t.unparametrize(<a:True|False>)",
    "weight norm": "t.weight_norm(<a>)",
    "replace module": "m[<a> % len(m)] = nn.Linear(W, W)",
    "to": "m.to(<a:'cpu'|torch.device('cpu')>)",
    "to dtype": "m.to(<a:torch.float32|torch.float64|torch.bfloat16>)",
    # gradients changed
    "grad in place": "t.p(<a>).grad.mul_(2)",
    "grad set": "p = t.p(<a>); p.grad = torch.ones_like(p) if plain(p) else None",
    "grad deleted": "t.p(<a>).grad = None",
    "grad kept": "t.keep['grad'] = t.p(<a>).grad",
    "grad kept read": "t.log('kept grad', t.keep['grad'])",
    "grad detach": "t.p(<a>).grad.detach_()",
    "grad data": "t.p(<a>).grad.data.mul_(2)",
    "clip norm": "t.log('norm', nn.utils.clip_grad_norm_(m.parameters(), 0.1<a:|, foreach=True|, norm_type=1.0|, foreach=False>))",
    "clip value": "nn.utils.clip_grad_value_(m.parameters(), 0.01<a:|, foreach=True>)",
    "norm": "t.log('norm', torch.stack([p.grad.float().norm() for p in m.parameters() if p.grad is not None]).norm())",
    "scaler": """
scaler = torch.amp.GradScaler('cpu', init_scale=<a:8.0|1e38>)
scaler.scale(t.loss()).backward()
for o in t.opts:
    <b:|scaler.unscale_(o)>
    t.log('returned', scaler.step(o))
scaler.update()
t.log('scale', scaler.get_scale())
t.zero(True)
""",
    # options, state, copies
    "lr": "for o in t.opts:\n    for g in o.param_groups: g['lr'] = g['lr'] * 0.5",
    "scheduler": "t.schedule(lambda o: torch.optim.lr_scheduler.<a:StepLR(o, 1)|OneCycleLR(o, 0.1, total_steps=50)|LambdaLR(o, lambda n: 1 / (n + 1))>)",
    "add group": "for o in t.opts[:1]: o.add_param_group({'params': <a:[nn.Parameter(torch.ones(3))]|nn.Linear(2, 2).parameters()>})",
    "optimizer state dict": "t.log('state dicts', [o.state_dict() for o in t.opts])",
    "optimizer reload": """
import copy
for o in t.opts: o.load_state_dict(<a:copy.deepcopy(o.state_dict())|o.state_dict()>)
""",
    "optimizer dict kept": "t.keep['state'] = [o.state_dict() for o in t.opts]",
    "optimizer dict copied": "import copy\nt.keep['state'] = [copy.deepcopy(o.state_dict()) for o in t.opts]",
    "optimizer dict read": "t.log('state dicts', t.keep['state'])",
    "optimizer dict written": "t.halve_dicts(t.keep['state'])",
    "optimizer dict loaded": "for o, d in zip(t.opts, t.keep['state']): o.load_state_dict(d)",
    "optimizer state cleared": "for o in t.opts: o.state.clear()",
    "state changed": "t.halve_state()",
    "state dict": "t.log('state dict', m.state_dict(<a:|keep_vars=True>))",
    "state dict kept": "t.keep['dict'] = m.state_dict()",
    "state dict kept read": "t.log('kept dict', t.keep['dict'])",
    "load state dict": "t.log('loaded', m.load_state_dict({k: v * 0.5 for k, v in m.state_dict().items()}<a:|, strict=False>))",
    "load kept": "m.load_state_dict(t.keep['dict']<a:|, assign=True>)",
    "deepcopy": "import copy\nt.use_copy(copy.deepcopy(m))",
    "pickle": "import pickle\nt.use_copy(pickle.loads(pickle.dumps(m)))",
    "save": "t.use_copy(t.saved(m))",
    "average": "t.average()",
    "hook removed": "t.remove_hook(<a>)",
    "forward only": "t.loss()",
    "garbage": "import gc\ngc.collect(0)",
}
