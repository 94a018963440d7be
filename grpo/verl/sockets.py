# SPDX-License-Identifier: Apache-2.0
"""A number of Ray's job that no other run on this machine has, imported by every process of verl
(VERL_USE_EXTERNAL_MODULES).

verl 0.9.1 names the sockets in /tmp through which vLLM gets the weights by that number alone, and Ray's first job is
01000000 in each Ray: of two runs side by side each took the other's weights.
"""

from ray.runtime_context import RuntimeContext

number_in_this_ray = RuntimeContext.get_job_id


def get_job_id(context: RuntimeContext) -> str:
    """Ray's number of the job behind the name of this Ray, which holds its start and its process."""
    return f"{context.get_session_name()}-{number_in_this_ray(context)}"


RuntimeContext.get_job_id = get_job_id
