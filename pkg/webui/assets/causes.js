// The explanations of causes and phases, as the page shows them without other sites. docs/inspect.md and docs/gangs.md have them too.

// The kind is the colour: "wait" passes by itself, "lack" needs memory or time, "wrong" needs a change, "good" is as it should be.
const explanations = {
  __proto__: null, // The address of the page can have any name.
  gated: ["wait", "The pod has scheduling gates, so no scheduler tries it.",
    "Remove the gates, or wait for the controller that set them."],
  not_tried: ["wrong", "No scheduler has tried the pod for 30 s.",
    "Check that a scheduler with the name in spec.schedulerName runs, and read its log."],
  scheduler_error: ["wrong", "kube-scheduler could not try or bind the pod: mostly it can't reach the extender. Its message says why.",
    "Check that the extender runs and that kube-scheduler's configuration has its address."],
  nominated: ["wait", "The pod is nominated to a node: kube-scheduler tries it there next, or pods of lower priority are being deleted there.",
    "Wait. Pods that are being deleted have a grace period."],
  invalid_request: ["wrong", "No node can give the pod what it asks for, for example because its memory can't be divided evenly over its cards, or because the pod is too large for gpushare. The message names the container, the label or the part.",
    "Correct it on the template of the pods."],
  invalid_group: ["wrong", "The annotations or labels that name the pod's group are wrong, or its members contradict each other. Or the pod's PodGroup doesn't exist. The message says which.",
    "Correct them on the template of the pods, or create the PodGroup."],
  waits_for_group: ["wait", "The pod is a member of a group that is bound all together or not at all. The message says what the group waits for.",
    "See the list of groups."],
  waits_for_turn: ["wait", "Tenants share the cluster, and it isn't the pod's turn. The message says what its tenant has and what its share is.",
    "Wait. If the tenant stays below its share, check why its next pod waits, in the list of shares."],
  fits: ["wait", "A card has room, and kube-scheduler is about to try the pod.",
    "Wait some seconds. If it stays pending, the cause changes and says what prevents it."],
  other_constraint: ["lack", "A card has room, but the pod's scheduler rejects the pod for another reason, such as CPU or a volume. The scheduler's message follows.",
    "Change what the message names."],
  reserved_for_other: ["wait", "A card has enough free memory, but this memory, or the node's CPU, memory or pods, is reserved for a group or pod that came first.",
    "Wait: that one is placed, or its reservation ends."],
  kept_for_nominated: ["wait", "A card has enough free memory, but it is reserved for a pod that is nominated to the node.",
    "Wait: that pod is bound soon, or loses its nomination."],
  failed_card: ["wrong", "A card has room, but another card of the node has failed. kube-scheduler counts the node's sum, which no longer includes the failed card, but the pods on that card still count.",
    "Delete the pods on the failed card, and repair or replace it."],
  waits_for_termination: ["wait", "The pod fits once pods that are being deleted have ended. The message names one.",
    "Wait. If a pod doesn't end, check it: a container may ignore its signal, a finalizer may be left, or its node may be down."],
  fragmented: ["lack", "A node has enough free memory in all, but not on one card, and a pod gets one card unless it asks for several. Or too few cards have room for a pod that asks for several, or for cores.",
    "Request at most the largest free piece, or end or move a pod."],
  full: ["lack", "Cards are large enough, but other pods hold too much of their memory or cores.",
    "Wait for a pod to end, or add a node."],
  crowded: ["lack", "A card has enough free memory, but it takes no more containers: NVIDIA's MPS has a limit.",
    "Wait for a pod to end, add a node, or use one with another isolation mode."],
  unhealthy: ["wrong", "Too few cards that are large enough are healthy.",
    "See the card's details in the list of cards, and the node's Events."],
  too_large: ["wrong", "No card is large enough, even when empty, no card takes as many containers as the pod has, or no node has as many such cards as the pod asks for. A pod's containers share their cards, so their sum counts. The request is a plain whole number, in the node's unit.",
    "Request less, or fewer cards, or use fewer containers."],
  no_node: ["wrong", "Each node that shares GPU memory is excluded: by the pod's node selector, affinity or tolerations, by the node's own state, because its device plugin doesn't support several cards or cores, or because its isolation mode doesn't allow several cards or the pod's volume at /dev/shm. The message says which.",
    "Change the pod's constraints, or make a node available."],

  incomplete: ["lack", "Too few members exist. Pods with scheduling gates, with invalid annotations or of an unknown scheduler don't count; the reason names them.",
    "Create all members at once. If no more are created, the reason says what a workload of their kind needs."],
  pending: ["wait", "Enough members exist, and no memory is reserved for them.",
    "Wait, request less, or add nodes, as the reason says."],
  planned: ["wait", "Memory is reserved for all members.", "Wait some seconds."],
  permitting: ["wait", "Binds are held until all members have arrived.", "Wait some seconds."],
  binding: ["wait", "Members are being bound, or it is unknown whether a bind took effect.", "Wait some seconds."],
  running: ["good", "All members have been bound.", "Nothing."],
  broken: ["wrong", "Some members are bound, and others could not be.", "The reason says why. The extender tries again, then evicts the bound members or keeps them, as its flag --gang-failure-policy says."],
  evicting: ["wrong", "Some members could not be bound, and the bound ones are being evicted.", "Wait: the group then starts again."],
};

export const kindOf = (name) => explanations[name]?.[0] ?? "lack";

/** meaning and advice of a cause or a phase, for the page's help. */
export function help(name) {
  const [, meaning, advice] = explanations[name] ?? ["", "The message beside it says more.", "See the extender's documentation."];
  return { meaning, advice };
}
