package pages

import "fmt"

// Kubeadm is what docs/install.md has an administrator run on a kubeadm control-plane node, as scripts for bash. The edit of
// kubeadm.yaml, which the page describes, is part of Install and Undo.
type Kubeadm struct {
	// Install writes kube-scheduler's manifest with the extender, Upload keeps it in the cluster.
	Install, Upload string
	// Restart restarts kube-scheduler, Logs prints the end of its log.
	Restart, Logs string
	// Restore writes the manifest as the cluster keeps it, Undo is for after Upload.
	Restore, Undo string
}

// ReadKubeadm reads the page.
func ReadKubeadm() (k Kubeadm, err error) {
	const page = "docs/install.md"
	blocks := map[string][]string{}
	for heading, count := range map[string]int{"kubeadm": 6, "Replace the configuration": 1, "kube-scheduler does not come up": 2, "Undo": 2} {
		if blocks[heading], err = Commands(page, heading); err != nil {
			return k, err
		}
		if got := len(blocks[heading]); got != count {
			return k, fmt.Errorf("%s shows %d blocks of commands under %q, want %d", page, got, heading, count)
		}
	}
	install, notUp, undo := blocks["kubeadm"], blocks["kube-scheduler does not come up"], blocks["Undo"]
	// The page names the line that its entries replace.
	const line = "scheduler: {}\n"
	entries := install[2]
	return Kubeadm{
		Install: install[0] + install[1] + replace(line, entries) + install[3] + install[4], Upload: install[5],
		Restart: blocks["Replace the configuration"][0],
		Logs:    notUp[0], Restore: notUp[1],
		Undo: undo[0] + replace(entries, line) + undo[1],
	}, nil
}

// replace returns commands that replace lines of kubeadm.yaml. They fail where the lines are missing.
func replace(before, after string) string {
	return fmt.Sprintf(`before='%s' after='%s' text="$(<kubeadm.yaml)"$'\n'
[[ $text == *"$before"* ]]
printf '%%s' "${text/"$before"/"$after"}" > kubeadm.yaml
`, before, after)
}
