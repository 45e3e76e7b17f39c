"""Hooks of every kind, each registered before or after the model is offloaded.

``t.see(name)`` is a hook that notes what it is given and changes nothing; ``t.handles`` keeps the handles.
"""

from __future__ import annotations

_P = "t.p(<a>)"
_M = "t.mod(<a>)"

HOOKS: dict[str, str] = {
    "tensor": f"t.handles.append({_P}.register_hook(t.see('tensor')) if {_P}.requires_grad else None)",
    "tensor changes": f"t.handles.append({_P}.register_hook(lambda g: <b:g * 2|g.clone()|g.contiguous()|g.sign()>) if {_P}.requires_grad else None)",
    "post accumulate": f"t.handles.append({_P}.register_post_accumulate_grad_hook(t.see_parameter('accumulated')) if {_P}.requires_grad else None)",
    "post accumulate changes": f"t.handles.append({_P}.register_post_accumulate_grad_hook(lambda p: <b:p.grad.mul_(0.5)|setattr(p, 'grad', p.grad * 2)|setattr(p, 'grad', None)> and None) if {_P}.requires_grad else None)",
    "accumulation node": f"t.on_node({_P}, <b:'register_hook'|'register_prehook'>)",
    "multi grad": "t.handles.append(torch.autograd.graph.register_multi_grad_hook([p for p in m.parameters() if p.requires_grad][:<a:1|3|9>], t.see('multi')<b:|, mode='any'>))",
    "forward pre": f"t.handles.append({_M}.register_forward_pre_hook(t.see_module('forward pre')<b:|, prepend=True>))",
    "forward": f"t.handles.append({_M}.register_forward_hook(t.see_module('forward')<b:|, prepend=True|, always_call=True>))",
    "forward changes": f"t.handles.append({_M}.register_forward_hook(lambda m, x, y: y * 2 if torch.is_tensor(y) else None))",
    "forward pre changes": "t.handles.append(m[<a> % len(m)].register_forward_pre_hook(lambda m, x: (x[0] * 2,)))",
    "backward": f"t.handles.append({_M}.register_full_backward_hook(t.see_module('backward')))",
    "backward pre": f"t.handles.append({_M}.register_full_backward_pre_hook(t.see_module('backward pre')))",
    "state dict": f"t.handles.append({_M}.register_state_dict_post_hook(t.see_dict('state dict')))",
    "state dict pre": f"t.handles.append({_M}.register_state_dict_pre_hook(t.see_nothing('state dict pre')))",
    "load state dict": f"t.handles.append({_M}.register_load_state_dict_<a:pre|post>_hook(t.see_nothing('load state dict')))",
    "step pre": "t.on_optimizers('register_step_pre_hook', t.see_step('step pre'))",
    "step post": "t.on_optimizers('register_step_post_hook', t.see_step('step post'))",
    "step pre changes": "t.on_optimizers('register_step_pre_hook', t.halve_gradients)",
    "optimizer state dict": "t.on_optimizers('register_state_dict_<a:pre|post>_hook', t.see_nothing('optimizer state dict'))",
    "all steps": "t.globally(sys.modules['torch.optim.optimizer'].register_optimizer_step_<a:pre|post>_hook(t.see_step('all steps')))",
    "all modules": "t.globally(nn.modules.module.register_module_<a:forward|full_backward>_hook(t.see_nothing('all modules')))",
    "all modules pre": "t.globally(nn.modules.module.register_module_forward_pre_hook(t.see_nothing('all modules pre')))",
}
