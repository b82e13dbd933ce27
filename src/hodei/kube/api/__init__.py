"""KUBERNETES' API: how to reach one, list and watch it, and its objects as far as we read them. Decides nothing.

Both who schedule pods (`hodei.kube`) and who run jobs as pods (`hodei.backends.kubernetes`) stand on it.
"""
