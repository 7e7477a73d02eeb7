package inspect

import (
	"bytes"
	"strings"
	"unicode/utf8"
)

// writePending writes the pending pods. It writes nothing if there are none.
func writePending(out *bytes.Buffer, report Report, f format) {
	pendingRows(report.PendingPods, f.wide).writeAlone(out, f)
}

// pendingRows returns a row with the diagnosis of each pending pod. wide adds kube-scheduler's message, unshortened.
func pendingRows(pods []PendingPod, wide bool) rows {
	header := row{bold, []string{"NAMESPACE", "NAME", "REQUEST", "CAUSE", "WHY"}}
	if wide {
		header.cells = append(header.cells, "SCHEDULER", "SCHEDULER SAYS")
	}
	table := rows{header}
	for _, pod := range pods {
		cells := []string{pod.Namespace, pod.Name, pod.Request.String(), string(pod.Cause), pod.Explanation}
		if wide {
			cells = append(cells, pod.Scheduler, pod.Reason)
		}
		table.add(plain, cells...)
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
