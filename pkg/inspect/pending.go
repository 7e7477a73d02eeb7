package inspect

import (
	"bytes"
	"strings"
	"unicode/utf8"
)

// writePending writes a row with the diagnosis of each pending pod. wide adds kube-scheduler's message, unshortened. It
// writes nothing if there are none.
func writePending(out *bytes.Buffer, report Report, f format) {
	header := row{bold, []string{"NAMESPACE", "NAME", "REQUEST", "CAUSE", "WHY"}}
	if f.wide {
		header.cells = append(header.cells, "SCHEDULER", "SCHEDULER SAYS")
	}
	table := rows{header}
	for _, pod := range report.PendingPods {
		cells := []string{pod.Namespace, pod.Name, pod.Request.String(), string(pod.Cause), pod.Explanation}
		if f.wide {
			cells = append(cells, pod.Scheduler, pod.Reason)
		}
		table.add(plain, cells...)
	}
	table.writeAlone(out, f)
}

// pendingRows returns the rows of pending pods below the nodes, with kube-scheduler's messages.
func pendingRows(pods []PendingPod, full bool) rows {
	table := rows{{bold, []string{"NAME", "NAMESPACE", "REQUEST", "REASON"}}}
	for _, pod := range pods {
		reason := pod.Reason
		if !full {
			reason = shorten(reason)
		}
		table.add(plain, pod.Name, pod.Namespace, pod.Request.String(), reason)
	}
	return table
}

// shorten shortens kube-scheduler's message. It removes the part on why preemption doesn't help.
func shorten(message string) string {
	message, _, cut := strings.Cut(oneLine(message), " preemption:")
	if end := strings.LastIndex(message, ". "); cut && end >= 0 && strings.HasSuffix(message, ",") {
		message = message[:end+1] // Messages of other plugins precede it: "no new claims to deallocate, preemption: …".
	}
	const limit = 160
	if utf8.RuneCountInString(message) <= limit {
		return message
	}
	return strings.TrimSpace(string([]rune(message)[:limit-1])) + "…"
}
