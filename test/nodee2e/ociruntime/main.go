// nvidiaruntime replaces NVIDIA's container runtime in tests. It mounts the driver library into each container whose
// environment requests cards; here this is the fake library with the files that it reads. Everything else is done by runc.
// The first argument is the path of the driver, which a wrapper script sets; the other arguments are runc's.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/fakenvml"
)

func main() {
	if err := run(os.Args[1], os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, "nvidiaruntime:", err)
		os.Exit(1)
	}
}

func run(driver string, args []string) error {
	bundle := ""
	creates := false
	for i, arg := range args {
		creates = creates || arg == "create"
		if arg == "--bundle" && i+1 < len(args) {
			bundle = args[i+1]
		}
	}
	if creates {
		if err := mountDriver(filepath.Join(bundle, "config.json"), driver); err != nil {
			return err
		}
	}
	runc, err := exec.LookPath("runc")
	if err != nil {
		return err
	}
	return syscall.Exec(runc, append([]string{runc}, args...), os.Environ())
}

// mountDriver mounts the library at Debian's path for it and sets the path of its files.
func mountDriver(config, driver string) error {
	data, err := os.ReadFile(config)
	if err != nil {
		return err
	}
	var spec map[string]any
	if err := json.Unmarshal(data, &spec); err != nil {
		return fmt.Errorf("%s: %w", config, err)
	}
	process, _ := spec["process"].(map[string]any)
	environment, _ := process["env"].([]any)
	requests := false
	for _, variable := range environment {
		text, _ := variable.(string)
		requests = requests || strings.HasPrefix(text, protocol.EnvVisibleDevices+"=")
	}
	if !requests {
		return nil
	}
	mounts, _ := spec["mounts"].([]any)
	bind := func(source, destination string) {
		mounts = append(mounts, map[string]any{
			"source": source, "destination": destination, "type": "bind", "options": []string{"rbind", "ro"},
		})
	}
	bind(driver, driver)
	triplets, _ := filepath.Glob("/usr/lib/*-linux-gnu/libc.so.6")
	for _, library := range triplets {
		bind(filepath.Join(driver, "libnvidia-ml.so.1"), filepath.Join(filepath.Dir(library), "libnvidia-ml.so.1"))
	}
	for _, variable := range fakenvml.NewMachine(driver).Env() {
		environment = append(environment, variable)
	}
	spec["mounts"], process["env"] = mounts, environment
	if data, err = json.Marshal(spec); err != nil {
		return err
	}
	return os.WriteFile(config, data, 0o600)
}
