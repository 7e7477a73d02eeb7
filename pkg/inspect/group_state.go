package inspect

import (
	"cmp"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// groupState is the state of groups as the API server shows it. What only the leader knows of a group is in kube-scheduler's messages about its members.
type groupState struct {
	manager *gang.Manager
	// messages are kube-scheduler's messages about pending members.
	messages map[types.NamespacedName]string
	// reported are the extender's reasons for groups, from these messages.
	reported map[gang.Key]reasons.Group
	// cardless are the numbers of pods that name a group and ask for no cards.
	cardless map[gang.Key]int
}

// newGroupState returns the state of the groups of the pods. podGroups is nil if native groups don't count. Pods of a PodGroup that places them one by
// one are in no group.
func newGroupState(pods []*corev1.Pod, podGroups map[gang.Key]gang.PodGroup, now time.Time) groupState {
	s := groupState{messages: map[types.NamespacedName]string{}, reported: map[gang.Key]reasons.Group{}, cardless: map[gang.Key]int{}}
	var members []gang.Member
	for _, pod := range pods {
		m := clustercache.NewPodInfo(pod).Member
		if m == nil || m.Gang.Native && podGroups == nil || podGroups[m.Gang].Alone {
			continue
		}
		members = append(members, *m)
		if m.Cardless && !m.Ended && !m.Leaving {
			s.cardless[m.Gang]++
		}
		for _, condition := range pod.Status.Conditions {
			if condition.Type == corev1.PodScheduled {
				s.messages[types.NamespacedName{Namespace: m.Namespace, Name: m.Name}] = condition.Message
				if reason, _ := reasons.ParseGroup(condition.Message); !reason.AwaitsOthers() && reason != reasons.GroupSurplus {
					s.reported[m.Gang] = cmp.Or(s.reported[m.Gang], reason)
				}
			}
		}
	}
	s.manager = gang.NewSnapshot(members, podGroups, now)
	return s
}

// runs returns the runs of all groups. Those that have ended are left out, unless nothing else is left of the group.
func (s groupState) runs() (out []gang.Report) {
	reports, _ := s.manager.Reports()
	lives := map[gang.Key]bool{}
	for i := range reports {
		lives[reports[i].Group] = lives[reports[i].Group] || !ended(&reports[i])
	}
	for i := range reports {
		r := &reports[i]
		first := i == 0 || reports[i-1].Group != r.Group
		if !ended(r) || first && !lives[r.Group] {
			out = append(out, *r)
		}
	}
	return out
}

// ended reports whether no member is left that runs or waits.
func ended(r *gang.Report) bool { return len(r.Bound)+len(r.Pending)+r.Cardless == 0 }

// of returns the run's state, and why members of it are pending.
func (s groupState) of(r *gang.Report) (state, reason string) {
	reported, message := s.messagesOf(r)
	broken := reported.Broken() || reported == reasons.GroupEvicting
	switch {
	case ended(r):
		return GroupEnded, ""
	case r.Phase == gang.PhaseRunning && broken: // The API server's objects don't show members that were deleted before all were bound.
		return GroupBroken, reported.Words
	case r.Phase == gang.PhaseRunning:
		return GroupRunning, cmp.Or(message, r.Reason.Words)
	case r.Problem != "":
		return GroupInvalid, r.Problem
	case r.Reason.Invalid():
		return GroupInvalid, r.Reason.Problem()
	case r.Phase == gang.PhaseBroken:
		return GroupBroken, latest(r.Reason, reported).Words
	case r.Phase == gang.PhasePending && message != "" && (reported == reasons.Group{} || reported.AwaitsOthers()):
		return GroupPending, message // That is why kube-scheduler hasn't tried all others.
	case r.Phase == gang.PhasePending:
		return GroupPending, latest(r.Reason, reported).Words
	}
	return GroupIncomplete, latest(r.Reason, reported).Words
}

// messagesOf returns the reason that the extender gave for a pending member of the run, and kube-scheduler's message about one if it isn't about the group.
// Either is empty if there is none.
func (s groupState) messagesOf(r *gang.Report) (reason reasons.Group, message string) {
	for _, name := range r.Pending {
		text := s.messages[types.NamespacedName{Namespace: r.Group.Namespace, Name: name}]
		switch found, ofGroup := reasons.ParseGroup(text); {
		case !ofGroup:
			message = cmp.Or(message, text)
		case reason == reasons.Group{} || reason.AwaitsOthers() || reason == reasons.GroupSurplus: // The others' say more.
			reason = found
		}
	}
	return reason, message
}

// latest returns why a run isn't running: the reason that the API server's objects show, with what the extender reported beyond that. Numbers of
// members in reported can be outdated.
func latest(shown, reported reasons.Group) reasons.Group {
	count, _, _ := strings.Cut(shown.Words, ",")
	switch {
	case shown.AwaitsOthers() || shown == reasons.GroupAwaitsTurn:
		return cmp.Or(reported, shown)
	case strings.HasPrefix(reported.Words, count):
		return reported
	case shown.Broken() && !reported.Broken():
		return shown.Because(reported)
	}
	return shown
}

// wait returns what the group of a pending pod waits for; nil if the pod waits for none.
func (s groupState) wait(object *corev1.Pod, pod *diagnosis.Pod) *diagnosis.GroupWait {
	status, waits := s.manager.Status(pod.UID)
	reported, ofGroup := reasons.ParseGroup(pod.Message)
	native := protocol.PodGroupName(object) != ""
	reason := latest(status.Reason, cmp.Or(reported, s.reported[status.Group]))
	switch {
	case status.Group == (gang.Key{}), !waits && !ofGroup:
		return nil
	case native && pod.Tried && !ofGroup:
		return nil // kube-scheduler has tried the pod. Whether the extender treats PodGroups as groups isn't known.
	case native && ofGroup, !waits:
		reason = reported
	}
	return &diagnosis.GroupWait{Group: status.Group.String(), Native: status.Group.Native, Reason: reason, Since: status.Since}
}
